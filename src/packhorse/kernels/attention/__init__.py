"""Attention of a span over stored K and V, in segments merged by log-sum-exp."""
