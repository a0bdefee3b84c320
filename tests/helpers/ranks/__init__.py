"""Programs with ranks that run functions under in-process restart."""
