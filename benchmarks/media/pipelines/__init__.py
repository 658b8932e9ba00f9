"""What a user writes: one file for each workload and contender, whose lines are counted."""
