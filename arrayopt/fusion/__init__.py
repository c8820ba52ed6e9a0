"""From a rule to a graph (traced), a plan (passes over memory), and a program for engines."""
