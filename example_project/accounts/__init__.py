"""Registration of users, and what follows from it."""
