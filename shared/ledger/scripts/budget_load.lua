-- Load accounts. Arguments: prefix of the budgets; rows of {namespace, start of the earliest window to
-- load besides the last}. Returns rows of {namespace, revision, tenures, charged, ended, state,
-- windows, budget}, as stored.
local BUDGETS, rows = ARGS[1], {}
for i, row in ipairs(ARGS[2]) do
  local name = row[1]
  local ids, starts = {}, BUDGETS .. 'starts:' .. name
  for _, id in ipairs(call('ZRANGEBYSCORE', starts, row[2], '+inf')) do ids[#ids + 1] = id end
  local open = call('HGET', BUDGETS .. 'open', name)
  if open then ids[#ids + 1] = open end
  local windows = {}
  for w, id in ipairs(ids) do windows[w] = call('HGET', BUDGETS .. 'windows:' .. name, id) end
  rows[i] = {name, call('HGET', BUDGETS .. 'revisions', name) or '',
    call('HGETALL', BUDGETS .. 'tenures:' .. name), call('HGETALL', BUDGETS .. 'charged:' .. name),
    call('HGETALL', BUDGETS .. 'ended:' .. name), call('HGET', BUDGETS .. 'states', name) or '', windows,
    call('HGET', BUDGETS .. 'budgets', name) or ''}
end
return encode(rows)
