-- List waiting pods. Arguments: {'pods', pods}, {'scan', cursor, count}, {'unreadable', cursor, count} or {'uids'}.
-- Returns uids; otherwise the next cursor ('0': complete) and rows of {verdict, since, record, group}, or the uids of
-- pods whose records cannot be read.
if ARGS[1] == 'uids' then return encode(call('HKEYS', PREFIX .. 'waiting')) end

if ARGS[1] == 'unreadable' then
  local found, broken = call('HSCAN', PREFIX .. 'waiting', ARGS[2], 'COUNT', ARGS[3]), {}
  for pod, value in each_pair(found[2]) do broken[#broken + 1] = not waiting_of(value) and pod or nil end
  return encode({found[1], broken})
end

local cursor, values = '0', {}
if ARGS[1] == 'scan' then
  local found = call('HSCAN', PREFIX .. 'waiting', ARGS[2], 'COUNT', ARGS[3])
  cursor = found[1]
  for i = 2, #found[2], 2 do values[#values + 1] = found[2][i] end
else
  values = call_all('HMGET', 'waiting', ARGS[2])
end
local rows = {}
for _, value in ipairs(values) do
  rows[#rows + 1] = waiting_row(value) or nil
end
return encode({cursor, rows})
