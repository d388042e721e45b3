"""The mesh service: `mesh` is what it decides, `service` its calls, `app` its life."""
