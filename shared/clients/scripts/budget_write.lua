-- Write what was decided, if what it was decided on still stands. Arguments: guards ({key of a hash,
-- field, value as read}), commands. Answers whether it was written.
for _, guard in ipairs(A[1]) do
  if (call('HGET', guard[1], guard[2]) or '') ~= guard[3] then return pack(false) end
end
for _, command in ipairs(A[2]) do call(unpack(command)) end
return pack(true)
