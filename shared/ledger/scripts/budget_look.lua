-- Look around. Arguments: prefix of the budgets and 'revisions' (answers namespaces, each before its
-- revision), or 'now' (answers ms), or 'entries', namespace, from (exclusive, '' for the first), most (answers rows of
-- {id, text}), or 'windows', namespace (answers texts), or 'done', keys (answers
-- their values, '' without one), or 'turn', name, milliseconds (answers
-- whether the caller is the first within that time).
local B, what = A[1], A[2]
if what == 'revisions' then return pack(call('HGETALL', B .. 'revisions')) end
if what == 'now' then
  local time = call('TIME')
  return pack(string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
end
if what == 'done' then
  local found = call('MGET', unpack(A[3]))
  for i, at in ipairs(found) do found[i] = at or '' end
  return pack(found)
end
if what == 'windows' then return pack(call('HVALS', B .. 'windows:' .. A[3])) end
if what == 'turn' then
  return pack(call('SET', B .. 'turn:' .. A[3], 1, 'NX', 'PX', A[4]) ~= false)
end
local rows = {}
local from = A[4] == '' and '-' or '(' .. A[4]
for i, entry in ipairs(call('XRANGE', B .. 'entries:' .. A[3], from, '+', 'COUNT', A[5])) do
  rows[i] = {entry[1], entry[2][2]}
end
return pack(rows)
