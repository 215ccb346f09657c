"""Figures: functions that return a figure of matplotlib."""
