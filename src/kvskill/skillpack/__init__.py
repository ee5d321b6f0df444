"""Installs the agent skill into the folders where clients look for skills."""
