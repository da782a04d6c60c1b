std = "lua51"
read_globals = {"redis", "cjson", "cmsgpack", "struct"} -- of the server
max_line_length = 120
