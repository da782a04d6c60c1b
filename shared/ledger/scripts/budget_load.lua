-- Read accounts. Arguments: prefix of the budgets, rows of {namespace, start of the earliest window
-- wanted besides the last}. Answers rows of {namespace, revision, tenures, charged, ended, standing,
-- windows, budget}, as stored.
local B, out = A[1], {}
for i, row in ipairs(A[2]) do
  local name = row[1]
  local ids, starts = {}, B .. 'starts:' .. name
  for _, id in ipairs(call('ZRANGEBYSCORE', starts, row[2], '+inf')) do ids[#ids + 1] = id end
  local open = call('HGET', B .. 'open', name)
  if open then ids[#ids + 1] = open end
  local windows = {}
  for w, id in ipairs(ids) do windows[w] = call('HGET', B .. 'windows:' .. name, id) end
  out[i] = {name, call('HGET', B .. 'revisions', name) or '', call('HGETALL', B .. 'held:' .. name),
    call('HGETALL', B .. 'charged:' .. name), call('HGETALL', B .. 'ended:' .. name),
    call('HGET', B .. 'standings', name) or '', windows,
    call('HGET', B .. 'budgets', name) or ''}
end
return pack(out)
