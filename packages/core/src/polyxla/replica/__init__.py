"""The object that a user's function receives in each replica, and the modules behind it."""
