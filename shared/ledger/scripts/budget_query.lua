-- Query budgets. Arguments: prefix of the budgets; then, by the second of them:
--   'revisions'                         returns namespaces, each before its revision
--   'now'                               returns ms
--   'entries', namespace, from (exclusive, '': the first), most
--                                       returns rows of {id, text}
--   'windows', namespace                returns texts
--   'charged', keys                     returns their values, '' without one
--   'lock', name, milliseconds          returns whether the caller got the lock for that time
local BUDGETS = ARGS[1]
local queries = {}

function queries.revisions()
  return call('HGETALL', BUDGETS .. 'revisions')
end

function queries.now()
  local time = call('TIME')
  return string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
end

function queries.charged(keys)
  local found = call('MGET', unpack(keys))
  for i, at in ipairs(found) do found[i] = at or '' end
  return found
end

function queries.windows(namespace)
  return call('HVALS', BUDGETS .. 'windows:' .. namespace)
end

function queries.lock(name, ttl_ms)
  return call('SET', BUDGETS .. 'lock:' .. name, 1, 'NX', 'PX', ttl_ms) ~= false
end

function queries.entries(namespace, after, most)
  local rows, from = {}, after == '' and '-' or '(' .. after
  for i, entry in ipairs(call('XRANGE', BUDGETS .. 'entries:' .. namespace, from, '+', 'COUNT', most)) do
    rows[i] = {entry[1], entry[2][2]}
  end
  return rows
end

return encode(queries[ARGS[2]](unpack(ARGS, 3)))
