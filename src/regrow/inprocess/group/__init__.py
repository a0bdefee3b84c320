"""Group of ranks: rules, messages, the service that runs them, and a rank's link to it."""
