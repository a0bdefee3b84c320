"""Logs and pages of steps for tests of the views."""
