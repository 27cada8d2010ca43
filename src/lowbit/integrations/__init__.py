"""Callbacks for other people's training loops."""
