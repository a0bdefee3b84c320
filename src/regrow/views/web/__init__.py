"""`regrow web`: the views of jobs as a page. Needs the extra `web`."""
