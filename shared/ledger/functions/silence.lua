-- Save since when agents have not replied about pods that are gone. Arguments: the instant, or false: they have; pods.
local server = require('server')
local encode = cmsgpack.pack

return function(since, pods)
  local parts = {}
  for i, pod in ipairs(since and pods or {}) do
    parts[2 * i - 1], parts[2 * i] = since, pod
  end
  server.call_all('ZADD', 'silent', parts)
  if not since then server.call_all('ZREM', 'silent', pods) end
  return encode(true)
end
