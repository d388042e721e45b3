"""The report of a logged run, as text and as a page."""
