"""Where each kind of attention finds its numbers in a published config."""
