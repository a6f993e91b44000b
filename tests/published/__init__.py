"""Published training steps, restated from their descriptions and run beside this package's."""
