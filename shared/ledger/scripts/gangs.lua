-- Answers {gang, pod} of every live lease that is counted with its gang.
local rows = {}
for i, entry in ipairs(call('ZRANGE', P .. 'ganged', 0, -1)) do
  rows[i] = {string.match(entry, '^(.*)|([^|]*)$')}
end
return pack(rows)
