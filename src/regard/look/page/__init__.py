"""The HTML page: one offline file with its data, script and style."""
