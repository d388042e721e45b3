"""The limits, encodings and queues that clients and servers share."""
