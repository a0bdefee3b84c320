"""Terminal output of `regrow run`: console lines and the status line."""
