-- Read waiting pods. Arguments: {'pods', pods} or {'scan', cursor, count}.
-- Answers: next cursor ('0': all seen), rows of {capacity number, since, record, group}.
local cursor, values = '0', {}
if A[1] == 'scan' then
  local found = call('HSCAN', P .. 'waiting', A[2], 'COUNT', A[3])
  cursor = found[1]
  for i = 2, #found[2], 2 do values[#values + 1] = found[2][i] end
else
  values = records_of(A[2])
end
local rows = {}
for _, value in ipairs(values) do
  if value then
    local record = decode(value)
    rows[#rows + 1] = {record[3], record[4], record[5], record[1]}
  end
end
return pack({cursor, rows})
