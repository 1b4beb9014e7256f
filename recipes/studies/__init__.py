"""Evidence: runs studies of many runs, compares them, and draws their tables and figures."""
