"""Benchmarks: one figure each, with machine facts, beside the replay of whole workloads."""
