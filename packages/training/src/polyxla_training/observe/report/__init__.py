"""A run that was logged, as text and as a page."""
