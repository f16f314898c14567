"""The words between Ivy and Tulip over gRPC: hortus.proto, what protoc makes of it, and wire.py, its only reader."""
