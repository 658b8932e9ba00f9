"""Pipeline declarations as data, validated where the user writes them. No Ray, torch or I/O."""
