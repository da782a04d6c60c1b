-- Save since when agents have not replied about pods that are gone. Arguments: the instant, or false: they have; pods.
local parts = {}
for i, pod in ipairs(ARGS[1] and ARGS[2] or {}) do
  parts[2 * i - 1], parts[2 * i] = ARGS[1], pod
end
call_all('ZADD', 'silent', parts)
if not ARGS[1] then call_all('ZREM', 'silent', ARGS[2]) end
return encode(true)
