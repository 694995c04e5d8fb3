"""Real engines, models for them, and trainers and faults that they meet."""
