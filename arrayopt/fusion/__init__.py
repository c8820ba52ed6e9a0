"""Trace a rule as a graph, plan passes over memory from it, and lower the plan to a program, which engines print."""
