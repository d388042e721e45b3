"""What LightningModules, data modules and Lightning's users expect of a trainer. Imports no Lightning."""
