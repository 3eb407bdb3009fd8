"""The demo: makes a corpus on any machine, stops a run and resumes it on another mesh, and measures both."""
