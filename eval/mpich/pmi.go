// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
)

// A pmi is what ranks of one program find each other by: the server of PMI-1, the line
// protocol of MPICH's mpiexec. With it ranks are processes of ours, wherever we start
// them: no launcher, no names of hosts, no proxies.
type pmi struct {
	mu      sync.Mutex
	values  map[string]string
	ranks   []*os.File
	waiting int // in the barrier
}

// newPMI returns a server for ranks that are on a node each, so that they do not think of
// shared memory.
func newPMI(ranks int) *pmi {
	return &pmi{
		values: map[string]string{"PMI_process_mapping": fmt.Sprintf("(vector,(0,%d,1))", ranks)},
		ranks:  make([]*os.File, ranks),
	}
}

// connect returns the end of a connection that rank is given as descriptor 3, and its
// environment. Then either serve or Close of the other end, s.ranks[rank], is due.
func (s *pmi) connect(rank int) (*os.File, []string, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("connect rank %d: %w", rank, err)
	}
	// With ours not blocking, reading it does not take a thread.
	err = syscall.SetNonblock(fds[0], true)
	s.ranks[rank] = os.NewFile(uintptr(fds[0]), "pmi")
	theirs := os.NewFile(uintptr(fds[1]), "pmi")
	if err != nil {
		s.ranks[rank].Close()
		theirs.Close()
		return nil, nil, fmt.Errorf("connect rank %d: %w", rank, err)
	}
	return theirs, []string{"PMI_FD=3", fmt.Sprintf("PMI_RANK=%d", rank), fmt.Sprintf("PMI_SIZE=%d", len(s.ranks))}, nil
}

// serve answers a rank's commands until it has ended. One that aborts says so, and waits
// for being killed.
func (s *pmi) serve(rank int, kill func()) {
	conn := s.ranks[rank]
	defer conn.Close()
	for r := bufio.NewReader(conn); ; {
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		if strings.HasPrefix(line, "cmd=abort") {
			kill()
			return
		}
		s.answer(conn, strings.TrimSuffix(line, "\n"))
	}
}

// answer answers a command. What cannot be written is for a rank that has ended.
func (s *pmi) answer(rank *os.File, line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// A value is the rest of the line.
	line, value, _ := strings.Cut(line, " value=")
	words := map[string]string{}
	for _, word := range strings.Fields(line) {
		k, v, _ := strings.Cut(word, "=")
		words[k] = v
	}
	var answer string
	switch words["cmd"] {
	case "init":
		answer = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
	case "get_maxes":
		answer = "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024"
	case "get_appnum":
		answer = "cmd=appnum appnum=0"
	case "get_universe_size":
		answer = fmt.Sprintf("cmd=universe_size size=%d", len(s.ranks))
	case "get_my_kvsname":
		answer = "cmd=my_kvsname kvsname=xspin"
	case "put":
		s.values[words["key"]] = value
		answer = "cmd=put_result rc=0 msg=success"
	case "get":
		if value, ok := s.values[words["key"]]; ok {
			answer = "cmd=get_result rc=0 msg=success value=" + value
		} else {
			answer = "cmd=get_result rc=-1 msg=no_such_key value=unknown"
		}
	case "barrier_in":
		if s.waiting++; s.waiting < len(s.ranks) {
			return
		}
		s.waiting = 0
		for _, r := range s.ranks {
			fmt.Fprintln(r, "cmd=barrier_out")
		}
		return
	case "finalize":
		answer = "cmd=finalize_ack"
	}
	fmt.Fprintln(rank, answer)
}
