"""Files of a model directory and of the hub: found, checked and read."""
