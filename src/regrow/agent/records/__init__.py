"""What an agent records: events of the job, events and metrics of torch, failure reports."""
