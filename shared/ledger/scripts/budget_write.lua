-- Write what was decided, if what it was decided on still stands. Arguments: guards ({key of a hash,
-- field, value as read}), commands, and empty or {windows by start, windows, the open one, instant before
-- which the others go}. Answers whether it was written.
local OLD_AT_ONCE = 100
for _, guard in ipairs(A[1]) do
  if (call('HGET', guard[1], guard[2]) or '') ~= guard[3] then return pack(false) end
end
for _, command in ipairs(A[2]) do call(unpack(command)) end
local starts, windows, open, before = unpack(A[3])
if starts then
  for _, id in ipairs(call('ZRANGEBYSCORE', starts, '-inf', '(' .. before, 'LIMIT', 0, OLD_AT_ONCE)) do
    if id ~= open then
      call('HDEL', windows, id)
      call('ZREM', starts, id)
    end
  end
end
return pack(true)
