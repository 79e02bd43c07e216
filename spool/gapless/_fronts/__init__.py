"""What the fronts for AReaL, verl and other trainers share."""
