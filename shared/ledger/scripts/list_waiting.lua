-- List waiting pods. Arguments: {'pods', pods}, {'scan', cursor, count} or {'uids'}.
-- Returns uids; otherwise the next cursor ('0': complete) and rows of {verdict, since, record, group}.
if ARGS[1] == 'uids' then return encode(call('HKEYS', PREFIX .. 'waiting')) end

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
