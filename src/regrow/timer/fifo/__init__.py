"""The file timer: requests of workers through a named pipe, and the server that reads it."""
