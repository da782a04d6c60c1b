-- Write a decision, if its inputs have not changed. Arguments: guards ({key of a hash, field,
-- value as read}); commands; and {} or {windows by start, windows, the open one, instant before which the
-- others are deleted}. Returns whether it was written.
local MAX_DELETED = 100
for _, guard in ipairs(ARGS[1]) do
  if (call('HGET', guard[1], guard[2]) or '') ~= guard[3] then return encode(false) end
end
for _, command in ipairs(ARGS[2]) do call(unpack(command)) end
local starts, windows, open, before = unpack(ARGS[3])
if starts then
  local ids = call('ZRANGEBYSCORE', starts, '-inf', '(' .. before, 'LIMIT', 0, MAX_DELETED)
  for _, id in ipairs(ids) do
    if id ~= open then
      call('HDEL', windows, id)
      call('ZREM', starts, id)
    end
  end
end
return encode(true)
