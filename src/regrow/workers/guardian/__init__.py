"""The guardian: the process that runs an agent's workers, and the agent's handle for it.

The guardian process runs without `regrow`. So its own modules (`process`, `reaper`, `records`,
`spawn`, `protocol`, `procfs`) import only the standard library, and each other by relative imports.
`client` and `events` are the agent's side.
"""
