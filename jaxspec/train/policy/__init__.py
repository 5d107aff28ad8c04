"""A policy's training in one process: rollouts with speculation, updates, new weights into the engine."""
