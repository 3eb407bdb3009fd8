"""The demo: a corpus from what any machine has, a run that is stopped and resumed on another mesh, and what was measured."""
