"""What an engine tells about itself while it runs."""
