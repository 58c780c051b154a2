"""Where keys and values are kept when the device has no room for them: host memory, a folder, a store."""
