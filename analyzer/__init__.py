"""Analysis: reads, decides, says why. Never imports or runs the code it reads, never writes but the manifest."""
