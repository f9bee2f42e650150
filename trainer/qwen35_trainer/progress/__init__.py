"""Records of a run, and everything derived from them: sinks, views, summary, report."""
