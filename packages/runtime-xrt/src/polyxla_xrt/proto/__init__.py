"""The messages between processes, and the code that protoc makes of them."""
