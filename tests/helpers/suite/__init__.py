"""Rules of the suite itself: which tests may be skipped, and in which order the tests run."""
